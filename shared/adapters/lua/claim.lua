-- ARGV: epoch, limit, now, end of the lease. Returns [id, entry, id, entry, ...] in order.
local fenced = enter(ARGV[1])
if fenced then return fenced end

repeat
  local due = redis.call('ZRANGEBYSCORE', PARKED, '-inf', ARGV[3], 'LIMIT', 0, 500)
  for _, member in ipairs(due) do
    local id = id_of(member)
    local entry = redis.call('HGET', ENTRIES, id)
    if entry then move(id, entry, 'w', score_of(entry)) else redis.call('ZREM', PARKED, member) end
  end
until #due == 0

local claimed = {}
local popped = redis.call('ZPOPMIN', WAITING, ARGV[2])
for i = 1, #popped, 2 do
  local id = id_of(popped[i])
  local entry = redis.call('HGET', ENTRIES, id)
  if entry then
    claimed[#claimed + 1] = id
    claimed[#claimed + 1] = move(id, entry, 'c', ARGV[4])
  end
end
return as_json(claimed)
