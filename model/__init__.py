"""The architecture: config, layer plan, KV layout, weights, layers, backbone.

Importing this package or its ``config``, ``kv_layout``, ``tokenizer`` files loads no torch: the router needs them. Nor
does ``checkpoint``, for looking at a model before anything starts.
"""
