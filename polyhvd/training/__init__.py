"""The distributed optimizer's logic, once for all frameworks."""
