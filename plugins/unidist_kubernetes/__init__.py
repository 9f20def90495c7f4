"""Jobs in the pods of a Kubernetes cluster: a launcher, and manifests."""
