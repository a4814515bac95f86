-- KEYS: ends of leases, texts. ARGV: most members. Returns [name, text, name, text, ...] of those
-- whose lease has not ended.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local found = {}
local names = redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', '(' .. now, 'LIMIT', 0, ARGV[1])
for _, name in ipairs(names) do
  local text = redis.call('HGET', KEYS[2], name)
  if text then
    found[#found + 1] = name
    found[#found + 1] = text
  end
end
return found
