"""Several machines: an agent on each (`agent.py`), whose methods the tuner calls by name (`rpc.py`).

Any program that carries a process's standard input and output can be a transport; `transports.py` has ssh and srun. Under Ray
the agent is an actor (`ray_transport.py`).
"""
