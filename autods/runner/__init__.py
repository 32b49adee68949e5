"""Run trials on real ranks: Ray places and reaches the nodes, an agent on each node runs the ranks."""
