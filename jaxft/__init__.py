"""jaxft keeps JAX training alive.

This module is the contents page. Names are loaded when they are first used, so that importing
`jaxft.host` or `jaxft.launch` never imports JAX.
"""
