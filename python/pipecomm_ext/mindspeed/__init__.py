"""MindSpeed-MM's pipeline communication, by its names."""
