"""Measurements that take time and depend on the machine; never part of a test."""
