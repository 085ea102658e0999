"""Between a tree of JAX arrays and bytes: what to save, how to take it, how to put it back.

`leaves` gives every leaf one canonical form, `shards` decides which bytes of it this process
saves, `transfer` takes those bytes before the next step may overwrite them, `assembly` puts bytes
back into arrays on whatever mesh there is now, and `mesh` builds that mesh.
"""
