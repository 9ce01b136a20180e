"""Drawings of real objects and traces: inline SVG, and matplotlib, imported only by the functions that plot with it.

Every chapter uses this room; it reads public names and owns no state. A test keeps `style` equal to the site's CSS and
`engine_map` to the rooms that exist.
"""
