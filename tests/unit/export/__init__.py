"""Exports for other libraries."""
