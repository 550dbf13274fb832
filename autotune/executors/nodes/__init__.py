"""Several machines: an agent on each (`agent.py`), the stream to it (`wire.py`), and its ranks for a group (`remote.py`).

Whatever carries standard input and output of a process can be a transport: `transports.py` has ssh.
"""
