"""The tracker `wandb`: `unidist launch --track wandb:FOLDER`; `WANDB_MODE=online` sends the run to a server."""
