-- KEYS: stream. ARGV: id, most entries, seconds to live, text. Returns 0 when the chunk (or a
-- later one, or one of a later attempt) is there already, so a repeated command adds nothing.
local id, most, ttl_s, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local reply = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', most, id, 'text', text)
if type(reply) == 'table' and reply.err then
  if string.find(reply.err, 'equal or smaller', 1, true) then return 0 end
  return redis.error_reply(reply.err)
end
redis.call('EXPIRE', KEYS[1], ttl_s)
return 1
