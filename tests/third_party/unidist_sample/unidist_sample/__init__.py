"""A sample plugin of unidist; docs/plugins.md walks through it."""
