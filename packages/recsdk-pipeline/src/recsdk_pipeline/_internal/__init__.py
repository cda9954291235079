"""Not public: may change in any release."""
