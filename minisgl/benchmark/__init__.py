"""`minisgl bench`: measurements, by the public names only.

Every chapter uses this room. Absolute times count only on a GPU; on a CPU the ratios within one run do.
"""
