"""The page of a study, a training or a plan: one HTML file that needs no network.

`data.py` holds a page's content as plain data. `gather.py` builds it from a study, with `forecasts.py` (predictions before
each measurement), `memory_map.py` (fit by micro-batch) and `mattered.py` (effects of a knob). `training.py` builds it from a
launch and `planned.py` from a plan. `confidential.py` removes names from any of them. `charts.py` draws axes and marks,
`pictures.py` the charts; `page.py` fills the templates and writes the file.
"""
