# Install rules: find_package(weightbroker) gives weightbroker::client and weightbroker::proto.
