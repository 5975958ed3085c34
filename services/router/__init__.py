"""The router: HTTP in, worker calls out. No torch, no nixl, no ray; see README.md."""
