"""The page of a study, a training or a plan: one HTML file that needs no network.

`data.py` is what a page says, as plain data. `gather.py` makes it of a study, with `forecasts.py` (what was predicted before
it was measured), `memory_map.py` (what fits where) and `mattered.py` (what a knob changes); `training.py` of a launch and
`planned.py` of a plan. `confidential.py` takes names out of any of them. `charts.py` draws axes and marks, `pictures.py` the
charts; `page.py` fills the templates and writes the file.
"""
