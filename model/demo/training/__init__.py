"""Teaches the demo model on a CPU and writes its checkpoint; serving never imports it (``model/demo/README.md``)."""
