"""Benchmarks of what the library costs and what it saves: one file for each question.

`python -m benchmarks` lists them; `python -m benchmarks NAME` runs one.
"""
