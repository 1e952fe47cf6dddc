"""Operators of the ATen level inside engines whose processes nobody of ours starts, and what they did there.

- ``vllm``: the plug-in that vLLM calls in each of its processes.
- ``activation``: the environment's wishes, carried out in this process.
- ``tallies``: counts in a file that outlives the process.
- ``records``: what a process writes down at its start, and how all of it is read.
- ``merged``: the report made of that.

Importing this package imports nothing.
"""
