"""Settings to adapter parameters: the only place that knows both."""

from shared.adapters.kafka_params import KafkaParams
from shared.adapters.redis_store import RedisParams
from shared.runtime.settings import MeshSettings


def kafka_params(mesh: MeshSettings, client_id: str) -> KafkaParams:
    """Return how a service reaches Kafka.

    Args:
        mesh: Mesh-wide settings.
        client_id: The service's own name, used unless the settings name one.

    Raises:
        ConfigError: SASL without credentials.
    """
    kafka = mesh.kafka
    return KafkaParams(
        bootstrap_servers=kafka.bootstrap_servers,
        client_id=kafka.client_id or client_id,
        max_message_bytes=mesh.topics.max_message_bytes,
        replication_factor=kafka.replication_factor,
        security_protocol=kafka.security_protocol,
        sasl_mechanism=kafka.sasl_mechanism,
        sasl_username=kafka.sasl_username or None,
        sasl_password=kafka.sasl_password.get_secret_value() or None,
        ssl_cafile=kafka.ssl_cafile or None,
        ssl_certfile=kafka.ssl_certfile or None,
        ssl_keyfile=kafka.ssl_keyfile or None,
        connect_timeout_s=kafka.connect_timeout_s,
        request_timeout_s=kafka.request_timeout_s,
        session_timeout_s=kafka.session_timeout_s,
    )


def redis_params(mesh: MeshSettings) -> RedisParams:
    """Return how a service reaches Redis; keys carry the mesh's topic prefix as well."""
    redis = mesh.redis
    given = {
        "username": redis.username or None,
        "password": redis.password if redis.password.get_secret_value() else None,
        "ssl_ca": redis.ssl_cafile or None,
        "ssl_cert": redis.ssl_certfile or None,
        "ssl_key": redis.ssl_keyfile or None,
    }
    return RedisParams.model_validate(
        {
            "url": redis.url,
            "prefix": redis.key_prefix + mesh.topics.prefix,
            "max_connections": redis.max_connections,
            "timeout_s": redis.timeout_s,
            **{key: value for key, value in given.items() if value is not None},
        }
    )
