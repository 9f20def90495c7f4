"""The status of a running job: a web page, `unidist top`, and figures for Prometheus."""
