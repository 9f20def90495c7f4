"""The tracker `mlflow`: `unidist launch --track mlflow:FOLDER` or `mlflow:http://server:5000`."""
