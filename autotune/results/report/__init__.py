"""The page of a study, a training or a plan: one HTML file that needs no network.

`model.py` holds a page's content as plain data. `build.py` builds it from a study, with `build.py` (predictions before
each measurement), `build.py` (fit by micro-batch) and `knob_effects.py` (effects of a knob). `html.py` builds it from a
launch and `html.py` from a plan. `figures.py` draws axes and marks,
`figures.py` the charts; `page.py` fills the templates and writes the file.
"""
