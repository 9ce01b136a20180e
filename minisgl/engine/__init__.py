"""Turns a plan into device work: request table, batch builder, KV storage, attention, sampler, runner, the two loops.

Chapter 4 tells this room's story.
"""
