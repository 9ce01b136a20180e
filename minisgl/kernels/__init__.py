"""Device functions: the plain torch meaning of each first, its fast twin beside it.

Chapter 5 tells this room's story.
"""
