"""Several machines: an agent on each (`agent.py`), its stream (`rpc.py`), and its ranks in a group (`rpc.py`).

Any program that carries a process's standard input and output can be a transport; `transports.py` has ssh.
"""
