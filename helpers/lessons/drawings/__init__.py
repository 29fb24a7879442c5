"""Pictures of an idea, drawn from the numbers of the cell that asks for them: a module for each group of notebooks.

Notebooks import them as `draw` (00 to 04), `draw_mma` (10 to 13), `draw_masks` (20), `draw_decode` (21), `draw_backward` (22, 23
and 33), `draw_training` (24), `draw_hopper` (30 and 31), `draw_pingpong` (32), `draw_ring` (50 and 51) and
`draw_proof` (90 to 92). What measurements
show is drawn by figures/plot.py; the look of both is defined in figures/style.py.
"""
