"""The page of a study, a training or a plan: one HTML file that needs no network.

`model.py` holds a study's content as plain data, and `build.py` and `knob_effects.py` build it. `figures.py` draws the charts.
`html.py` fills the templates and writes the file.
"""
