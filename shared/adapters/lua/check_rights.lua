-- Runs once, on a key of its own, every command that the other scripts run: a right that is missing
-- is found, and named, before the first call comes.
-- KEYS[1]: the key. Nothing of it is left.
local key = KEYS[1]
local commands = {
  {'DEL', key},
  {'TIME'},
  {'SET', key, '1'},
  {'GET', key},
  {'DEL', key},
  {'HSET', key, 'a', '1'},
  {'HGET', key, 'a'},
  {'HGETALL', key},
  {'HDEL', key, 'a'},
  {'ZADD', key, 1, 'a', 2, 'b', 3, 'c'},
  {'ZCARD', key},
  {'ZSCORE', key, 'a'},
  {'ZRANGE', key, 0, 0},
  {'ZRANGEBYSCORE', key, '-inf', '+inf'},
  {'ZREVRANGEBYSCORE', key, '+inf', '-inf'},
  {'ZREM', key, 'a'},
  {'ZREMRANGEBYSCORE', key, '2', '2'},
  {'ZPOPMIN', key},
  {'XADD', key, 'MAXLEN', '~', 1, '1-1', 'text', ''},
  {'EXPIRE', key, 1},
  {'PEXPIREAT', key, 1},
  {'DEL', key},
}
for _, command in ipairs(commands) do
  local reply = redis.pcall(unpack(command))
  if type(reply) == 'table' and reply.err then
    return redis.error_reply(reply.err .. ' (' .. command[1] .. ')')
  end
end
return 1
