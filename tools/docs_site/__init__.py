"""The site of the documentation: settings, and what makes its pages; see tools/build_docs.py."""
