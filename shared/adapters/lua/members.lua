-- Returns [id, entry, id, entry, ...] of every state, in no order.
return as_json(redis.call('HGETALL', ENTRIES))
