"""
`egmla bench`: speed and memory of EG-MLA beside the library's own attention at the same shape.

A *cell* is one measurement (what, prompt, batch, dtype, allocator) of all systems, kept in one JSON file. `cells`
names and keeps them, `systems` builds what is measured, `worker` measures in a process of its own, `floor` says how
fast a machine could be, `schedule` runs what is missing and `report` shows what is there.
"""
