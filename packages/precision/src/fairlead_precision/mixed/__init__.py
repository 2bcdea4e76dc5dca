"""16-bit computation on 32-bit parameters."""
