"""gRPC: server and client of `lorajax.proto`. Needs the extra `lorajax[grpc]`."""
