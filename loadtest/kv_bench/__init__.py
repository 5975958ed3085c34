"""What the KV store costs over what the machine can do at all; ``python -m epdserve.loadtest.kv_bench``."""
