"""Paged KV cache and radix prefix cache: who owns which page.

Chapter 3 tells this room's story. `KVCacheManager` is the only owner of pages; nothing here knows what a page holds, so
nothing here imports torch.
"""

from minisgl.kv_cache.manager import Holding, KVCacheManager
from minisgl.kv_cache.naive import NaivePrefixCache
from minisgl.kv_cache.pages import PageAllocator
from minisgl.kv_cache.radix_tree import Match, Node, RadixTree

__all__ = ["Holding", "KVCacheManager", "Match", "NaivePrefixCache", "Node", "PageAllocator", "RadixTree"]
