"""What a collective means, once for all frameworks."""
