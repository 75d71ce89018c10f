"""What an optimizer does, once for all frameworks."""
