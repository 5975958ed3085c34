"""gRPC between the roles: the only place that knows protobuf and channels."""
