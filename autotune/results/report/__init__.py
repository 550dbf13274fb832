"""The page of a study: one HTML file that needs no network.

`model.py` holds a study's content as plain data, and `build.py` builds it. `figures.py` draws the chart. `html.py` fills the
templates and writes the file.
"""
