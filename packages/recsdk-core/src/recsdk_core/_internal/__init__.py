"""Not public: other packages do not import from here."""
