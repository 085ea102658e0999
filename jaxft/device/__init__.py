"""Between a tree of JAX arrays and bytes: what to save, how to take it, how to put it back.

`leaves` gives every leaf one canonical form, `shards` decides which bytes of it this process saves
and `layout` where they lie, `transfer` takes those bytes before the next step may overwrite them
(`gather` those of small leaves; `twin` all of them, in one program with the step itself), `copying`
puts them into the part, `assembly` finds out what is needed to restore on whatever mesh there is
now, `placing` puts it into arrays, and `mesh` builds that mesh.
"""
