"""One trial: rank processes that run real DeepSpeed steps, and what watches them.

protocol.py  JSON lines between the tuner and its ranks
devices.py   cuda and cpu behind one small interface, inside a rank
workload.py  the model and its batches
rank.py      what a rank does
server.py    the pre-imported fork server
gauge.py     memory seen from outside
verdict.py   from evidence to an Outcome's class
"""
