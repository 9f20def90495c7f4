"""The control plane of a job on several hosts: small authenticated messages, and who is there.

`wire` says what the bytes mean, `connection` moves them, `server` and `client` are the two ends. `meeting` and
`coordinator` decide, without touching a socket; `rendezvous` is what a rank sees of it.
"""
