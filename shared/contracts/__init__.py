"""What travels between the services: message classes, their codec, and the topics."""
