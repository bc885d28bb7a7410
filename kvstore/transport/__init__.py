"""How requests come in and answers go out: the descriptor socket, gRPC, the fast lane. No decision."""
