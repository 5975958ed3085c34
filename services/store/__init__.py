"""The store of a machine: host pool, host cache, SSD tier and peers behind one process; see README.md."""
