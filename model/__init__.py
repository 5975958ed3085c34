"""The architecture: config, layer plan, KV layout, weights, layers, backbone.

Importing this package or its ``config``, ``kv_layout``, ``tokenizer`` files loads no torch: the router needs them.
"""
