-- KEYS: ends of leases, texts. ARGV: name, text, lease in milliseconds.
-- Leases end by this server's clock, so no other clock has to agree with it; both keys vanish with
-- the last lease.
local ends, texts = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', now_ms)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now)) do
  redis.call('HDEL', texts, name)
end
redis.call('ZREMRANGEBYSCORE', ends, '-inf', now)
redis.call('ZADD', ends, string.format('%.0f', now_ms + ARGV[3]), ARGV[1])
redis.call('HSET', texts, ARGV[1], ARGV[2])
local last = redis.call('ZRANGE', ends, -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', ends, last)
redis.call('PEXPIREAT', texts, last)
return 1
