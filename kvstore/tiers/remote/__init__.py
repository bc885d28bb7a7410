"""What is beyond this node, at the edge: the REMOTE store. Its libraries are imported only when it is configured."""
